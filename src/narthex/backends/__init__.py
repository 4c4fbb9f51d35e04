"""How a decided plan looks in each kernel tool. Pure."""
