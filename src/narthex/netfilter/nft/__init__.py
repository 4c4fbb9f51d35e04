"""The language of nft: a printer for `nft -f`, and a parser for `nft list ruleset`.

The printer raises `Unprintable` for a word that does not have the expected form, so no foreign name can become syntax. The
parser never fails on foreign rules: unknown parts become `Unknown`.
"""
