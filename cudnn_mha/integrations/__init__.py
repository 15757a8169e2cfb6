"""What plugs cuDNN attention into other libraries: a module for each, imported only when used."""
