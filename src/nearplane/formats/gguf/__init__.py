"""GGUF, the file format of llama.cpp: blocks of weights, and the file around them."""
