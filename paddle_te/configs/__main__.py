"""Write docs/reference/config.md, see `paddle_te.configs.page`: python -m paddle_te.configs."""

from paddle_te.configs.page import PAGE, page


def main() -> None:
    """Write the page if it is not as it should be, and name it."""
    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        PAGE.write_text(page(), encoding="utf-8")
        print(f"{PAGE.name}: written")


if __name__ == "__main__":
    main()
