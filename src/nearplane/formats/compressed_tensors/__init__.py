"""The compressed-tensors format of transformers, vLLM and SGLang, and its six packings."""
