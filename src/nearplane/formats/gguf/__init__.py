"""GGUF, the file of llama.cpp: blocks of weights as it stores them, and the file around them."""
