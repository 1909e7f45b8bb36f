"""Files read and written safely, whoever has touched them."""
