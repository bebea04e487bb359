"""What each process of the launcher's jobs runs. In a folder of their own, which Python puts on the path of modules."""
