"""python -m paddle_te.configs: writes docs/reference/config.md, see `paddle_te.configs.page`."""

from paddle_te.configs.page import PAGE, page


def main():
    """Writes the page if it is not as it should be, and names it."""
    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        PAGE.write_text(page(), encoding="utf-8")
        print(f"{PAGE.name}: written")


if __name__ == "__main__":
    main()
