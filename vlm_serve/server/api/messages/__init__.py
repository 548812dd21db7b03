"""POST /v1/messages: a chat request in Anthropic's format."""
