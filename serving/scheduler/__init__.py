"""The engine's own account of its steps, and its step budget moved while it runs: a plugin of ours inside vLLM."""
