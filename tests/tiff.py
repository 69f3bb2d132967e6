"""TIFF files byte by byte: OpenCV writes neither tags of orientation nor kinds of alpha."""

import struct

_TAGS = {'photometric': 262, 'orientation': 274, 'extra': 338, 'kind': 339, 'planes': 284}
_KINDS = {'u': 1, 'i': 2, 'f': 3}


def tiff(img, order='<', big=False, pages=1, **tags):
    """The file of an image (h, w, c) in RGB, uncompressed; a tag is a number or None to omit it."""
    height, width, channels = img.shape
    word, start = ('Q', 16) if big else ('I', 8)
    data = img.astype(img.dtype.newbyteorder(order)).tobytes()
    fields = {256: [width], 257: [height], 258: [8 * img.itemsize] * channels, 259: [1]}
    fields |= {262: [2 if channels > 2 else 1], 273: [start], 277: [channels], 278: [height]}
    fields |= {279: [len(data)], 339: [_KINDS[img.dtype.kind]] * channels}
    fields |= {_TAGS[name]: [value] for name, value in tags.items()}
    fields = {tag: values for tag, values in sorted(fields.items()) if values != [None]}
    body, entries = data, b''
    for tag, values in fields.items():
        kind = ('I', 4) if tag in (273, 279) else ('H', 3)
        raw = struct.pack(f'{order}{len(values)}{kind[0]}', *values)
        if len(raw) > struct.calcsize(f'={word}'):
            place, body = start + len(body), body + raw + b'\0' * (len(raw) % 2)
            raw = struct.pack(order + word, place)
        entries += struct.pack(f'{order}HH{word}', tag, kind[1], len(values))
        entries += raw.ljust(struct.calcsize(f'={word}'), b'\0')
    body += b'\0' * (len(body) % 2)
    page, count = start + len(body), struct.pack(order + ('Q' if big else 'H'), len(fields))
    following = page + len(count + entries) + struct.calcsize(f'={word}') if pages > 1 else 0
    directory = count + entries + struct.pack(order + word, following)
    if pages > 1:
        directory += count + entries + struct.pack(order + word, 0)
    magic = struct.pack(f'{order}HHH', 43, 8, 0) if big else struct.pack(f'{order}H', 42)
    return (
        (b'II' if order == '<' else b'MM')
        + magic
        + struct.pack(order + word, page)
        + (body + directory)
    )
