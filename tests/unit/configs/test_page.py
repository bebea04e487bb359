"""docs/reference/config.md is what the schema makes, and says of each family what it has."""

from paddle_te.configs.page import PAGE, page
from paddle_te.configs.schema import SCHEMAS, keys_of


def test_the_page_is_made_from_the_schema():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m paddle_te.configs writes it"


def test_every_key_has_a_row():
    text = page()
    for record in SCHEMAS.values():
        for name, key in keys_of(record).items():
            assert f"| `{name}`" in text and key.means in text
            assert all(f"`{word}`" in text for word in key.theirs or ())
