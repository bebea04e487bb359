"""run_finetune.py with TE's kernels emulated in NumPy (tests/emulated_te.py), for nvgpu's host runtime."""

from paddle_te.upstream import deferred_imports

if __name__ == "__main__":
    deferred_imports.apply()
    import paddle

    from paddle_te.hosts.paddlenlp.training import finetune
    from tests import emulated_te

    paddle.set_device("nvgpu")
    emulated_te.install()
    finetune.main()
