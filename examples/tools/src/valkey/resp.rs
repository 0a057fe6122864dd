//! Encodes requests to Valkey and parses its answers. The format is RESP2.

/// The length of the longest line in an answer, in bytes. A line is a simple text, an error, or a length.
const MAX_LINE: usize = 64 << 10;
/// The length of the longest value, in bytes, as in `valkey-server`. It is also the largest number of elements in an array.
const MAX_LEN: i64 = 512 << 20;
/// The largest memory that an answer may need, in bytes.
const MAX_ANSWER: usize = 1 << 30;
/// The largest depth of nested arrays.
const MAX_DEPTH: usize = 32;

/// Appends a request to `out`. The first part is the name of a command.
pub fn request<P: AsRef<[u8]>>(out: &mut impl Extend<u8>, parts: &[P]) {
    out.extend(format!("*{}\r\n", parts.len()).into_bytes());
    for part in parts.iter().map(AsRef::as_ref) {
        out.extend(format!("${}\r\n", part.len()).into_bytes());
        out.extend(part.iter().copied());
        out.extend(*b"\r\n");
    }
}

/// An answer of the server.
// bound: tool-valkey
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A short text, such as `OK`.
    Simple(String),
    /// An error. The first word is its kind.
    Error(String),
    /// A number.
    Integer(i64),
    /// A value. It may contain any bytes.
    Bulk(Vec<u8>),
    /// The null value: the requested value does not exist.
    Null,
    /// An array of answers.
    Array(Vec<Self>),
}

/// The smallest unit that the parser reads from the stream.
enum Element {
    Whole(Answer),
    /// The head of an array. The field is the number of elements that follow.
    ArrayOf(usize),
}

/// The parser of a stream of answers. It parses no byte twice, even if the stream arrives in small parts. It does not recurse, so
/// nested arrays cannot overflow the stack.
// bound: tool-valkey
#[derive(Debug, Default)]
pub struct Answers {
    input: Vec<u8>,
    /// The number of bytes at the beginning of `input` that are parsed.
    parsed: usize,
    /// The arrays that are incomplete, the outermost first. Each entry has the number of missing elements, and the elements that have
    /// arrived so far.
    open: Vec<(usize, Vec<Answer>)>,
    /// The memory that the incomplete answer uses, in bytes.
    memory: usize,
}

impl Answers {
    /// Returns the buffer to which the caller must append bytes that have arrived.
    pub fn input(&mut self) -> &mut Vec<u8> {
        self.input.drain(..std::mem::take(&mut self.parsed));
        &mut self.input
    }

    /// Returns the next answer, or `None` if it is not complete yet.
    ///
    /// # Errors
    /// The bytes are not an answer, or exceed a limit.
    pub fn next_answer(&mut self) -> Result<Option<Answer>, String> {
        while let Some(element) = self.element()? {
            let mut complete = match element {
                Element::Whole(answer) => answer,
                Element::ArrayOf(0) => Answer::Array(Vec::new()),
                Element::ArrayOf(_) if self.open.len() == MAX_DEPTH => {
                    return Err(format!("arrays nested deeper than {MAX_DEPTH}"));
                }
                Element::ArrayOf(len) => {
                    self.open.push((len, Vec::new()));
                    continue;
                }
            };
            loop {
                let Some((left, items)) = self.open.last_mut() else {
                    self.memory = 0;
                    return Ok(Some(complete));
                };
                items.push(complete);
                *left -= 1;
                if *left > 0 {
                    break;
                }
                complete = self.open.pop().map_or(Answer::Null, |(_, items)| Answer::Array(items));
            }
        }
        Ok(None)
    }

    /// Parses one element. Returns `None` if it is not complete yet.
    fn element(&mut self) -> Result<Option<Element>, String> {
        let rest = &self.input[self.parsed..];
        let Some(&kind) = rest.first() else { return Ok(None) };
        if !b"+-:$*".contains(&kind) {
            return Err(format!("an answer that begins with the byte {kind:#04x}"));
        }
        let Some(line) = rest.iter().take(MAX_LINE).position(|&byte| byte == b'\n') else {
            return if rest.len() < MAX_LINE { Ok(None) } else { Err(format!("a line of more than {MAX_LINE} bytes")) };
        };
        let text = rest[1..line].strip_suffix(b"\r").ok_or("a line without a carriage return")?;
        let text = || String::from_utf8_lossy(text).into_owned();
        let number = || text().parse::<i64>().map_err(|_| format!("{:?} where a number was expected", text()));
        let mut used = line + 1;
        let element = match kind {
            b'+' => Element::Whole(Answer::Simple(text())),
            b'-' => Element::Whole(Answer::Error(text())),
            b':' => Element::Whole(Answer::Integer(number()?)),
            _ => match number()? {
                -1 => Element::Whole(Answer::Null),
                len @ 0..=MAX_LEN if kind == b'*' => Element::ArrayOf(len as usize),
                len @ 0..=MAX_LEN => {
                    let Some(bulk) = rest.get(used..used + len as usize + 2) else { return Ok(None) };
                    used += bulk.len();
                    let bytes = bulk.strip_suffix(b"\r\n").ok_or("a value without a line end after it")?;
                    Element::Whole(Answer::Bulk(bytes.to_vec()))
                }
                len => return Err(format!("a length of {len}")),
            },
        };
        self.parsed += used;
        self.memory += used.max(size_of::<Answer>());
        if self.memory > MAX_ANSWER {
            Err(format!("an answer of more than {MAX_ANSWER} bytes"))
        } else {
            Ok(Some(element))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses a stream that arrives in parts of `piece` bytes. Returns the answers.
    fn parsed(bytes: &[u8], piece: usize) -> Result<Vec<Answer>, String> {
        let (mut answers, mut all) = (Answers::default(), Vec::new());
        for piece in bytes.chunks(piece) {
            answers.input().extend_from_slice(piece);
            while let Some(answer) = answers.next_answer()? {
                all.push(answer);
            }
        }
        Ok(all)
    }

    #[test]
    fn a_request_is_an_array_of_values() {
        let mut out = Vec::new();
        request(&mut out, &[&b"SET"[..], b"key", b"a\r\nb", b""]);
        assert_eq!(out, b"*4\r\n$3\r\nSET\r\n$3\r\nkey\r\n$4\r\na\r\nb\r\n$0\r\n\r\n");
    }

    #[test]
    fn answers_are_the_same_however_they_are_cut() {
        let stream = b"+OK\r\n-ERR no\r\n:-7\r\n$4\r\na\r\nb\r\n$-1\r\n*-1\r\n*0\r\n$0\r\n\r\n\
            *3\r\n*2\r\n:1\r\n*1\r\n+x\r\n$1\r\ny\r\n*0\r\n+end\r\n";
        let bulk = |bytes: &[u8]| Answer::Bulk(bytes.to_vec());
        let wanted = vec![
            Answer::Simple("OK".into()),
            Answer::Error("ERR no".into()),
            Answer::Integer(-7),
            bulk(b"a\r\nb"),
            Answer::Null,
            Answer::Null,
            Answer::Array(vec![]),
            bulk(b""),
            Answer::Array(vec![
                Answer::Array(vec![Answer::Integer(1), Answer::Array(vec![Answer::Simple("x".into())])]),
                bulk(b"y"),
                Answer::Array(vec![]),
            ]),
            Answer::Simple("end".into()),
        ];
        for piece in 1..=stream.len() {
            assert_eq!(parsed(stream, piece).as_ref(), Ok(&wanted), "{piece}");
        }
    }

    #[test]
    fn what_is_no_answer_is_said() {
        for (bytes, words) in [
            (&b"HTTP/1.1 400\r\n"[..], "begins with the byte 0x48"),
            (b"+OK\n", "without a carriage return"),
            (b":x\r\n", "\"x\" where a number was expected"),
            (b"$-2\r\n", "a length of -2"),
            (b"$536870913\r\n", "a length of 536870913"),
            (b"*99999999999999999999\r\n", "where a number was expected"),
            (b"$2\r\nabc\r\n", "without a line end"),
            (&[b'+'; MAX_LINE], "a line of more than"),
            (&b"*1\r\n".repeat(MAX_DEPTH + 1), "arrays nested deeper"),
        ] {
            let why = parsed(bytes, bytes.len()).unwrap_err();
            assert!(why.contains(words), "{words}: {why}");
        }
    }

    #[test]
    fn an_answer_has_a_limit_however_small_its_parts() {
        let mut answers = Answers::default();
        answers.input().extend_from_slice(format!("*{MAX_LEN}\r\n").as_bytes());
        answers.memory = MAX_ANSWER - 2 * size_of::<Answer>();
        answers.input().extend_from_slice(b"+\r\n");
        assert_eq!(answers.next_answer(), Ok(None));
        answers.input().extend_from_slice(b"+\r\n");
        assert!(answers.next_answer().unwrap_err().contains("an answer of more than"));
    }
}
