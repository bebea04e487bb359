"""Fine-tunes Llama: see paddle_te.training.finetune, or --help."""

from paddle_te.training.finetune import main

if __name__ == "__main__":
    main()
