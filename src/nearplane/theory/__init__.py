"""Runnable forms of the published theory: OBQ, QR factor, LLL, HPTQ with Huffman codes, plane geometry."""
