"""The seed papers made runnable: OBQ, the factor by QR, LLL, HPTQ with Huffman codes, profiles, geometry in the plane, pictures."""
