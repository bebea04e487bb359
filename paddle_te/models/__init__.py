"""What a model's decoder layers are made of, whatever host they serve (`paddle_te.hosts`)."""
