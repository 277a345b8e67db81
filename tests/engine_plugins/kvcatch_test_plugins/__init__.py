"""vLLM plugins that only tests switch on, each by its own environment variable."""
