"""Govern at the door: an OpenAI-compatible proxy that knows KV blocks. Only ``cli`` may import it."""
