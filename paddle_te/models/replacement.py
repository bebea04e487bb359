"""The switch: our decoder layers in the place of a host's."""

from contextlib import contextmanager


@contextmanager
def replace_decoder_layers(*models):
    """While it lasts, a host's constructors build the decoder layers of our classes `models`; afterwards nothing has
    changed.

    Each has host_module, the host's module whose constructors build decoder layers, and decoder_class, ours, whose name
    is the host's after TE.
    """
    names = {model: model.decoder_class.__name__.removeprefix("TE") for model in models}
    kept = {model: getattr(model.host_module, name) for model, name in names.items()}
    for model, name in names.items():
        setattr(model.host_module, name, model.decoder_class)
    try:
        yield
    finally:
        for model, name in names.items():
            setattr(model.host_module, name, kept[model])
