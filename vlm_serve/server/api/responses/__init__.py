"""POST /v1/responses: OpenAI's newer chat API, and its stored responses."""
