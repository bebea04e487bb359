"""Texts to the files that training reads, their readers, and samples that all hosts have alike."""
