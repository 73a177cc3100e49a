"""`python -m xmigd.cli`"""

from xmigd.cli.app import main

if __name__ == "__main__":
    main()
