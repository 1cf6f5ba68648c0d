from lm.cli.main import program

program()
