"""Storage that fails or lies during a program's saves, and checks of the exceptions and of the state afterwards."""
