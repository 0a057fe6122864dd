//! Draws the heat map: one panel for latency and one for bandwidth, with a square for each pair of ranks. The row is the rank that
//! sends, the column the rank that receives.
//!
//! All squares of one colour are one SVG path, so the file stays small even with hundreds of ranks.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::control::Figure;
use super::report::{Report, SHM, name};
use super::results::Results;

/// The largest width of a panel.
const PANEL: f64 = 560.0;
/// The width of the margin for the labels.
const MARGIN: f64 = 110.0;
const TOP: f64 = 96.0;
/// The smallest width of a panel. Its legend needs this width.
const NARROWEST: f64 = 330.0;
/// The largest tolerance that the colour scale covers.
const STEEPEST: f64 = 16.0;
/// The largest width of a square.
const WIDEST: f64 = 44.0;
/// The largest number of squares in a row. With more ranks, a square stands for several ranks in each direction, and shows the worst pair
/// of these ranks.
const MOST: usize = 512;
/// The largest number of labels on an axis.
const LABELS: usize = 32;
/// The colours of the scale, from the best figure to the worst.
const SCALE: [&str; 10] =
    ["#f7fcf0", "#e3f1c8", "#f6eaa0", "#fdd276", "#fdb055", "#f98a43", "#ee6338", "#d63c32", "#ab1d33", "#74082b"];
const UNKNOWN: &str = "#d0d0d0";
const BROKEN: &str = "#202020";
/// The dot that marks a link in shared memory. It is visible on all colours of the scale.
const DOT: &str = "fill=\"#0040d0\" stroke=\"white\" stroke-width=\"0.5\"";

/// The dimensions of a panel.
#[derive(Clone, Copy, Debug)]
struct Grid {
    /// The number of ranks that a row or column of squares stands for.
    ranks_per_square: usize,
    /// The number of squares in a row.
    squares: usize,
    /// The width of a square.
    side: f64,
}

impl Grid {
    fn new(ranks: usize) -> Self {
        let ranks_per_square = ranks.div_ceil(MOST).max(1);
        let squares = ranks.div_ceil(ranks_per_square);
        Self { ranks_per_square, squares, side: (PANEL / squares as f64).min(WIDEST) }
    }

    fn width(&self) -> f64 {
        self.side * self.squares as f64
    }
}

/// The state of a square. If a square stands for several pairs, it shows the greatest of the pairs' states, in the order of the variants.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
enum Square {
    /// The square is on the diagonal: it stands for a rank with itself.
    Nothing,
    /// The figure was not measured.
    Unknown,
    /// The figure was measured. The number is the index of its colour in the scale.
    Level(usize),
    /// The pair does not work.
    Broken,
}

/// Returns the index of the colour for a cost. The colour of the median cost is at a quarter of the scale. The last colour is that of the
/// median cost multiplied by twice the tolerance.
fn level(cost: f64, median: f64, tolerance: f64) -> usize {
    let doublings = (cost / median).log2();
    let share = 0.25 + 0.75 * doublings / (2.0 * tolerance).log2();
    ((share * SCALE.len() as f64) as usize).min(SCALE.len() - 1)
}

fn median(results: &Results, figure: Figure) -> Option<f64> {
    let ranks = results.ranks();
    let ways = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))).filter(|(from, to)| from != to);
    let mut costs: Vec<_> = ways.filter_map(|(from, to)| results.cost(from, to, figure)).collect();
    let middle = costs.len().checked_sub(1)? / 2;
    Some(*costs.select_nth_unstable_by(middle, f64::total_cmp).1)
}

/// Draws the heat map as SVG.
#[must_use]
pub fn svg(report: &Report<'_>) -> String {
    let results = report.results;
    let grid = Grid::new(results.ranks());
    let panel = grid.width().max(NARROWEST) + MARGIN;
    let width = 2.0 * panel + MARGIN / 2.0;
    let height = TOP + grid.width() + 120.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#404040\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    // Writing to a string does not fail.
    let _ = writeln!(svg, "<text x=\"{MARGIN}\" y=\"28\" font-size=\"16\">rdma-mesh</text>");
    for (line, y) in wrap(&report.summary(), (width - MARGIN) as usize / 7).into_iter().zip([46, 62]) {
        let _ = writeln!(svg, "<text x=\"{MARGIN}\" y=\"{y}\">{}</text>", escape(&line));
    }
    draw_panel(&mut svg, report, Figure::Latency, grid, MARGIN);
    draw_panel(&mut svg, report, Figure::Bandwidth, grid, MARGIN + panel);
    svg.push_str("</svg>\n");
    svg
}

fn draw_panel(svg: &mut String, report: &Report<'_>, figure: Figure, grid: Grid, left: f64) {
    let (results, tolerance) = (report.results, report.tolerance.min(STEEPEST));
    let median = median(results, figure);
    let state = |from: usize, to: usize| {
        if from == to {
            return Square::Nothing;
        }
        match (results.pair(from, to).broken.is_some(), results.cost(from, to, figure), median) {
            (true, ..) => Square::Broken,
            (false, Some(cost), Some(median)) => Square::Level(level(cost, median, tolerance)),
            _ => Square::Unknown,
        }
    };
    let mut squares = Vec::with_capacity(grid.squares * grid.squares);
    let ranks_of = |square: usize| {
        let first = square * grid.ranks_per_square;
        first..(first + grid.ranks_per_square).min(results.ranks())
    };
    for row in 0..grid.squares {
        for column in 0..grid.squares {
            let pairs = ranks_of(row).flat_map(|from| ranks_of(column).map(move |to| (from, to)));
            let worst = pairs
                .map(|(from, to)| state(from, to))
                .fold(Square::Nothing, |worst, next| if next > worst { next } else { worst });
            squares.push(worst);
        }
    }
    let figure_name = name(figure);
    let unit = if figure == Figure::Latency { "half round trip, p50" } else { "RDMA Write, row to column" };
    let _ =
        writeln!(svg, "<text x=\"{left:.1}\" y=\"{:.1}\" font-size=\"14\">{figure_name}: {unit}</text>", TOP - 10.0);
    let path = |of: Square| {
        let mut path = String::new();
        for (place, _) in squares.iter().enumerate().filter(|(_, square)| **square == of) {
            let (row, column) = (place / grid.squares, place % grid.squares);
            let (x, y, side) = (left + column as f64 * grid.side, TOP + row as f64 * grid.side, grid.side);
            let _ = write!(path, "M{x:.1} {y:.1}h{side:.2}v{side:.2}h-{side:.2}z");
        }
        path
    };
    let levels = SCALE.iter().enumerate().map(|(level, colour)| (Square::Level(level), *colour));
    for (square, colour) in levels.chain([(Square::Unknown, UNKNOWN), (Square::Broken, BROKEN)]) {
        let path = path(square);
        if !path.is_empty() {
            let _ = writeln!(svg, "<path d=\"{path}\" fill=\"{colour}\"/>");
        }
    }
    mark_shm(svg, report, grid, left);
    outline_odd(svg, report, figure, grid, left);
    draw_labels(svg, results, grid, left);
    draw_legend(svg, figure, median, tolerance, grid, left);
    if report.has_shm() {
        let y = TOP + grid.width() + 98.0;
        let _ = writeln!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" {DOT}/><text x=\"{:.1}\" y=\"{y:.1}\" font-size=\"11\">{SHM}</text>",
            left + 6.0,
            y - 4.0,
            left + 17.0
        );
    }
    let _ = writeln!(
        svg,
        "<rect class=\"panel\" data-figure=\"{figure_name}\" x=\"{left:.1}\" y=\"{TOP:.1}\" width=\"{0:.1}\" height=\"{0:.1}\" \
         fill=\"transparent\" stroke=\"#909090\"/>",
        grid.width()
    );
}

/// Draws a dot on each square that has a link in shared memory.
fn mark_shm(svg: &mut String, report: &Report<'_>, grid: Grid, left: f64) {
    let square = |rank: usize| rank / grid.ranks_per_square;
    let pairs = report.results.pairs().filter(|(.., pair)| pair.shm);
    let marked: BTreeSet<_> = pairs.flat_map(|(a, b, _)| [(square(a), square(b)), (square(b), square(a))]).collect();
    if marked.is_empty() {
        return;
    }
    let radius = (grid.side / 6.0).min(3.0);
    let mut path = String::new();
    for (row, column) in marked {
        let middle = |start: f64, square: usize| start + (square as f64 + 0.5) * grid.side;
        let _ = write!(
            path,
            "M{:.1} {:.1}a{radius:.2} {radius:.2} 0 1 0 {wide:.2} 0a{radius:.2} {radius:.2} 0 1 0 -{wide:.2} 0z",
            middle(left, column) - radius,
            middle(TOP, row),
            wide = 2.0 * radius
        );
    }
    let _ = writeln!(svg, "<path class=\"shm\" d=\"{path}\" {DOT}/>");
}

fn outline_odd(svg: &mut String, report: &Report<'_>, figure: Figure, grid: Grid, left: f64) {
    let ways = report.odd_ways.iter().filter(|way| way.figure == figure);
    let both =
        ways.flat_map(|way| [Some((way.from, way.to)), (figure == Figure::Latency).then_some((way.to, way.from))]);
    for (from, to) in both.flatten() {
        let (row, column) = (from / grid.ranks_per_square, to / grid.ranks_per_square);
        let _ = writeln!(
            svg,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{2:.1}\" height=\"{2:.1}\" fill=\"none\" stroke=\"#0040d0\" stroke-width=\"2\"/>",
            left + column as f64 * grid.side,
            TOP + row as f64 * grid.side,
            grid.side
        );
    }
}

fn draw_labels(svg: &mut String, results: &Results, grid: Grid, left: f64) {
    let every = grid.squares.div_ceil(LABELS);
    for square in (0..grid.squares).step_by(every) {
        let rank = square * grid.ranks_per_square;
        let member = &results.members()[rank];
        let colour = if member.is_here() { "#404040" } else { "#c00000" };
        let host: String = member.host().chars().take(12).collect();
        let y = TOP + (square as f64 + 0.5) * grid.side + 4.0;
        let x = left + (square as f64 + 0.5) * grid.side + 4.0;
        let bottom = TOP + grid.width() + 8.0;
        let host = escape(&host);
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{y:.1}\" text-anchor=\"end\" fill=\"{colour}\">{host} {rank}</text>\n\
             <text transform=\"translate({x:.1} {bottom:.1}) rotate(-90)\" text-anchor=\"end\" fill=\"{colour}\">{rank}</text>",
            left - 6.0
        );
    }
}

fn draw_legend(svg: &mut String, figure: Figure, median: Option<f64>, tolerance: f64, grid: Grid, left: f64) {
    let top = TOP + grid.width() + 40.0;
    let side = 16.0;
    for (level, colour) in SCALE.iter().enumerate() {
        let x = left + level as f64 * side;
        let _ = writeln!(svg, "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{side}\" height=\"12\" fill=\"{colour}\"/>");
    }
    let value = |cost: f64| match figure {
        Figure::Latency => format!("{cost:.1} us"),
        Figure::Bandwidth => format!("{:.2} Gb/s", 1.0 / cost),
    };
    let range = median.map_or_else(
        || "nothing was measured".to_owned(),
        |median| format!("median {}; the last colour is from {} on", value(median), value(2.0 * tolerance * median)),
    );
    let _ = writeln!(svg, "<text x=\"{left:.1}\" y=\"{:.1}\" font-size=\"11\">{range}</text>", top + 27.0);
    let key = [(BROKEN, "does not work"), (UNKNOWN, "not measured")];
    let mut x = left;
    for (colour, text) in key {
        let y = top + 36.0;
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"11\">{text}</text>",
            x + 17.0,
            y + 10.0
        );
        x += 100.0;
    }
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"11\" height=\"11\" fill=\"none\" stroke=\"#0040d0\" stroke-width=\"2\"/>\
         <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"11\">worse than its peers</text>",
        top + 36.5,
        x + 17.0,
        top + 46.0
    );
}

/// Breaks a sentence at spaces into lines of at most `most` characters.
fn wrap(text: &str, most: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let full =
            lines.last().is_some_and(|line| !line.is_empty() && line.chars().count() + word.chars().count() >= most);
        if full {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

/// Escapes text for XML and HTML.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::sample;

    fn squares(svg: &str, colour: &str) -> usize {
        let end = format!("fill=\"{colour}\"/>");
        svg.lines()
            .filter(|line| line.starts_with("<path") && line.ends_with(&end))
            .map(|l| l.matches('M').count())
            .sum()
    }

    #[test]
    fn each_pair_has_a_square_and_the_state_is_seen() {
        let results = sample::faulty();
        let svg = svg(&Report::new(&results, 3.0));
        let all: usize = SCALE.into_iter().chain([UNKNOWN, BROKEN]).map(|colour| squares(&svg, colour)).sum();
        assert_eq!(all, 2 * 7 * 6);
        // Seven links are broken: the cut link, and the six links of the rank that is gone. Each has two directions and appears in both
        // panels.
        assert_eq!(squares(&svg, BROKEN), 2 * 2 * 7);
        assert_eq!(squares(&svg, SCALE[9]), 2 + 1, "the slow link: latency both ways, bandwidth one way");
        assert_eq!(svg.matches("stroke=\"#0040d0\"").count(), 3 + 2, "three squares, two legends");
        let dots: Vec<_> = svg.lines().filter(|line| line.starts_with("<path class=\"shm\"")).collect();
        assert_eq!(dots.iter().map(|line| line.matches('M').count()).collect::<Vec<_>>(), [2, 2], "ranks 3 and 6");
        assert_eq!(
            (svg.matches(SHM).count(), super::svg(&Report::new(&sample::even(3), 3.0)).matches("shm").count()),
            (2, 0)
        );
    }

    #[test]
    fn large_maps_stay_small_and_show_the_worst() {
        let mut results = sample::even(600);
        results.fails(599, 300, "cut");
        let svg = svg(&Report::new(&results, 3.0));
        assert_eq!(squares(&svg, BROKEN), 4);
        assert!(svg.len() < 8 << 20, "{} bytes", svg.len());
    }

    #[test]
    fn the_scale_begins_below_the_median_and_ends_behind_the_tolerance() {
        assert_eq!((level(0.01, 1.0, 3.0), level(1.0, 1.0, 3.0), level(6.0, 1.0, 3.0)), (0, 2, 9));
        assert!(level(3.0, 1.0, 3.0) < 9 && level(1e9, 1.0, 3.0) == 9);
        assert_eq!(escape("<a & \"b\">"), "&lt;a &amp; &quot;b&quot;&gt;");
        assert_eq!(wrap("one two three", 8), ["one two", "three"]);
    }
}
