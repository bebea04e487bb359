"""What a shared library shows to the other libraries of its process."""

from elftools.elf.elffile import ELFFile


def exported(library):
    """The names of all symbols that others could be bound to; those of C++'s std look like _ZNSt6locale…"""
    with open(library, "rb") as file:
        symbols = [*ELFFile(file).get_section_by_name(".dynsym").iter_symbols()]
    return {
        symbol.name
        for symbol in symbols
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
    }
