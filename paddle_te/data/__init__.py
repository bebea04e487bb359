"""Text to the files that training reads. Imports PaddleNLP only where it is used, since that takes seconds."""
