"""Images: decoding, resizing, the patches that a vision tower reads, and prompts with images."""
