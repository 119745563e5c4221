"""Images and videos in prompts.

encodings   which images are encoded, and where their embeddings are      books on the host
encoder     the embedding buffer, and the tower that writes to it         device
feature     what images add to plans and uploads
"""
