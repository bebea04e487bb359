"""Reading the files that training reads, whatever the host."""
