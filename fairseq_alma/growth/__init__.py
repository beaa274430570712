"""How models grow: gate trees and operations on plain tensors and checkpoint files. No fairseq."""
