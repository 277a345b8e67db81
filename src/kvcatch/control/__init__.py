"""Acting on a live engine: the scheduler plugin. Only ``scheduler`` and ``queue`` import vLLM."""
