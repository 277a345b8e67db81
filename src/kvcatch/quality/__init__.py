"""Does another KV cache, quantised or thinned out, change the answers? Measured on the user's own engine."""
