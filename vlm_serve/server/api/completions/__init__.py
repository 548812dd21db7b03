"""POST /v1/completions: prompts as text or token ids, without a chat template."""
