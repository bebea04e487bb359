"""What is made of a batch's tensor once, for all layers that are given the tensor."""


def kept_on(tensor, make, *arguments):
    """make(tensor, *arguments); from the second time on what it gave before, which is kept on the tensor.

    It is made again where the tensor has changed in place, by an operation that Paddle counts (`inplace_version`).
    """
    kept, call = _kept(tensor), (make, *arguments)
    version, made = kept.get(call, (None, None))
    if version != tensor.inplace_version:
        made = make(tensor, *arguments)
        kept[call] = tensor.inplace_version, made
    return made


def copy_with_kept(tensor):
    """A copy that keeps what the tensor keeps."""
    copy = tensor.clone()
    _kept(copy).update({call: (copy.inplace_version, made) for call, (_, made) in _kept(tensor).items()})
    return copy


def _kept(tensor):
    """{(make, *arguments): (the version that it was made of, what it gave)}."""
    if not hasattr(tensor, "_paddle_te_kept"):
        tensor._paddle_te_kept = {}
    return tensor._paddle_te_kept
