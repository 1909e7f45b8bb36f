"""Reading and writing of files, safely."""
