"""``python -m lightning_pardist.compat``: print the table of private names in use, as a page of the documentation."""

from lightning_pardist.compat.contract import as_markdown

if __name__ == "__main__":
    print(as_markdown(), end="")
