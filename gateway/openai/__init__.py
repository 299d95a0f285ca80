"""OpenAI's API with vLLM's additions: chat, completions, tokenize."""
