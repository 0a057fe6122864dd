//! Reads the tables of a Markdown document.

/// A row of a table: its line in the document, and its cells.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) line: usize,
    pub(crate) cells: Vec<String>,
}

/// A table without its head row.
#[derive(Debug)]
pub(crate) struct Table {
    /// The path of the document.
    pub(crate) file: String,
    pub(crate) rows: Vec<Row>,
}

/// Returns the first table below a heading.
///
/// # Panics
/// Panics if the heading does not exist, its section has no table, or the rows differ in length.
pub(crate) fn table(file: &str, text: &str, heading: &str) -> Table {
    let mut lines = text
        .lines()
        .enumerate()
        .skip_while(|(_, line)| line.trim_start_matches('#').trim() != heading || !line.starts_with('#'));
    assert!(lines.next().is_some(), "{file}: there is no heading \"{heading}\"");
    let section = lines.take_while(|(_, line)| !line.starts_with('#'));
    let rows = section.skip_while(|(_, line)| !line.starts_with('|')).take_while(|(_, line)| line.starts_with('|'));
    let rows = rows.map(|(at, line)| {
        let cells = line.trim().trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
        Row { line: at + 1, cells }
    });
    let mut rows: Vec<Row> = rows.collect();
    assert!(rows.len() > 2, "{file}: there is no table below \"{heading}\"");
    let columns = rows[0].cells.len();
    for row in &rows {
        assert_eq!(row.cells.len(), columns, "{file}:{}: the row has another number of cells than the head", row.line);
    }
    rows.drain(..2);
    Table { file: file.into(), rows }
}

/// Returns the texts in a cell that are marked as code.
pub(crate) fn code(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(Into::into).collect()
}
