"""GGUF, the file of llama.cpp: blocks of weights as it stores them, and the file around them."""

from nearplane.formats.gguf.container import GGUFFile
from nearplane.formats.gguf.file import GGUFReader
from nearplane.formats.gguf.layers import LAYERS, METHOD, Config

__all__ = ["LAYERS", "METHOD", "Config", "GGUFFile", "GGUFReader"]
