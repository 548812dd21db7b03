"""POST /inference/v1/generate: token ids in, token ids out, in vLLM's format."""
