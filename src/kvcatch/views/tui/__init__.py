"""The live screen of ``kvcatch top``. The only place that imports textual."""
