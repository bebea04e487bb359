"""python -m paddle_te.options: writes the documentation's tables of options, see `paddle_te.options.pages`."""

from paddle_te.options.pages import ROOT, pages


def main() -> None:
    """Write the pages that are not as they should be, and name them."""
    for path, text in pages().items():
        if not path.is_file() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"{path.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()
