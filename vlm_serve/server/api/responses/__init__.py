"""POST /v1/responses: OpenAI's newer form of a chat request, and the answers that it stores."""
