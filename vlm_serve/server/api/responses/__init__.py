"""POST /v1/responses: OpenAI's newer form of a chat request. Nothing is kept between requests."""
