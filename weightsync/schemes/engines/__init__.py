"""Inference engines with an API of their own as workers: vLLM and SGLang."""
