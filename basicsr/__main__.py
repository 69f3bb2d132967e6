"""``python -m basicsr COMMAND [flags]``, where the console command is not on the path."""

from basicsr.cli import main

if __name__ == '__main__':
    main()
