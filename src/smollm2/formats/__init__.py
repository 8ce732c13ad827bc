"""File formats: bytes to named arrays and back, with no knowledge of models."""
