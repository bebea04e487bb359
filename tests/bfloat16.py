"""bfloat16 numbers in NumPy's float32."""


def truncated(values):
    """The float32 array with numbers that bfloat16 holds: without their lower 16 bits."""
    return (values.view("uint32") & 0xFFFF0000).view("float32")
