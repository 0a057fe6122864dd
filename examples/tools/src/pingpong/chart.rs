//! Draws charts as SVG, such as latency by message size.

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::*;

use super::failure::Failure;
use super::figures::{Figures, size_label};

const WIDTH: u32 = 960;
const HEIGHT: u32 = 600;

/// A logarithmic axis. Labels are at 1, 2 and 5 of each decade for microseconds, or at powers of two for bytes.
// local: the width of a chart
#[derive(Clone, Debug)]
struct Axis {
    low: f64,
    high: f64,
    /// The values that have a line and a label.
    marks: Vec<f64>,
    label: fn(f64) -> String,
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let share = (value / self.low).ln() / (self.high / self.low).ln();
        limit.0 + (share * f64::from(limit.1 - limit.0)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.marks.clone()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.low..self.high
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        (self.label)(*value)
    }
}

/// Makes an axis whose labels are powers of two. The axis begins a little below the smallest value and ends a little above the largest
/// value.
fn size_axis(values: impl Iterator<Item = f64> + Clone) -> Axis {
    let (low, high) = (values.clone().fold(f64::MAX, f64::min), values.fold(0.0, f64::max));
    let (first, last) = (low.log2().floor() as i32, high.log2().ceil() as i32);
    // The axis has a label at every `step`th power of two, so that it has about twelve labels at most.
    let step = ((last - first) / 12 + 1) as usize;
    let marks = (first..=last).step_by(step).map(|power| 2_f64.powi(power)).collect();
    Axis { low: low / 1.3, high: high * 1.3, marks, label: |bytes| size_label(bytes as u64) }
}

/// Makes an axis with labels at 1, 2 and 5 of each decade. The axis begins at the last label below all values, and ends at the first label
/// above all values.
fn decades(values: impl Iterator<Item = f64> + Clone, label: fn(f64) -> String) -> Axis {
    let (low, high) = (values.clone().fold(f64::MAX, f64::min), values.fold(0.0, f64::max));
    let decades = (low.log10().floor() as i32 - 1)..=(high.log10().ceil() as i32 + 1);
    let all: Vec<f64> = decades.flat_map(|d| [1.0, 2.0, 5.0].map(|m| m * 10_f64.powi(d))).collect();
    let low = all.iter().copied().filter(|&m| m < low).fold(all[0], f64::max);
    let high = all.iter().copied().filter(|&m| m > high).fold(f64::MAX, f64::min);
    let marks = all.into_iter().filter(|m| (low..=high).contains(m)).collect();
    Axis { low, high, marks, label }
}

fn time_label(us: f64) -> String {
    if us < 1.0 { format!("{us:.1}") } else { format!("{us:.0}") }
}

/// Makes an axis with labels at powers of ten. The axis begins slightly below the smallest value and ends slightly above the largest value.
fn powers_of_ten(values: impl Iterator<Item = f64> + Clone) -> Axis {
    let Axis { marks, label, .. } = decades(values.clone(), count_label);
    let (low, high) = (values.clone().fold(f64::MAX, f64::min), values.fold(0.0, f64::max));
    let marks = marks.into_iter().filter(|mark| mark.log10().fract() == 0.0 && (low..=high).contains(mark)).collect();
    Axis { low: low / 1.3, high: high * 1.3, marks, label }
}

fn count_label(count: f64) -> String {
    match count {
        1e6.. => format!("{} M", count / 1e6),
        1e3.. => format!("{} K", count / 1e3),
        _ => format!("{count:.0}"),
    }
}

/// Draws the p50 and the p99 of latency by message size. Both axes are logarithmic.
///
/// # Errors
/// The drawing library failed.
pub fn latency(results: &[Figures]) -> Result<String, Failure> {
    let points = |provider: &str, quantile: f64| -> Vec<(f64, f64)> {
        results
            .iter()
            .filter(|figures| figures.provider == provider)
            .filter_map(|figures| {
                let h = figures.measured.latency.as_ref()?;
                Some((f64::from(figures.plan.job.size), (h.value_at_quantile(quantile) as f64 / 1e3).max(1e-3)))
            })
            .collect()
    };
    let mut providers: Vec<&str> = results.iter().map(|figures| figures.provider.as_str()).collect();
    providers.dedup();
    let (mut lines, names) = (Vec::new(), providers.join(" and "));
    if let [other @ .., first] = &providers[..] {
        // If there are results of two transports, shared memory and TCP, each transport has its own lines.
        if let [other, ..] = other {
            lines.push(("p50, TCP", points(other, 0.5), RGBColor(120, 150, 180)));
            lines.push(("p99, TCP", points(other, 0.99), RGBColor(220, 170, 140)));
        }
        lines.push(("p50", points(first, 0.5), RGBColor(31, 96, 168)));
        lines.push(("p99", points(first, 0.99), RGBColor(214, 96, 32)));
    }
    let title = results.first().map_or_else(String::new, |figures| {
        let job = &figures.plan.job;
        format!("rdma-pingpong: {} {}, provider {names}, wait {}", job.op, figures.plan.time(), job.wait)
    });
    let y = results.first().map_or_else(String::new, |figures| format!("{}, us", figures.plan.time()));
    by_size(&title, &y, &lines)
}

/// The name of a line, its points, and its colour.
pub type Line = (&'static str, Vec<(f64, f64)>, RGBColor);

/// Draws lines by message size. Both axes are logarithmic.
///
/// # Errors
/// There are no points, or the drawing library failed.
pub fn by_size(title: &str, y: &str, lines: &[Line]) -> Result<String, Failure> {
    let points = all_points(lines)?;
    let axes = (size_axis(points.iter().map(|p| p.0)), decades(points.iter().map(|p| p.1), time_label));
    draw(title, ("message size", y), axes, lines)
}

/// Draws lines by the number of connections. Both axes are logarithmic.
///
/// # Errors
/// There are no points, or the drawing library failed.
pub fn by_connections(title: &str, y: &str, lines: &[Line]) -> Result<String, Failure> {
    let points = all_points(lines)?;
    let axes = (powers_of_ten(points.iter().map(|p| p.0)), decades(points.iter().map(|p| p.1), count_label));
    draw(title, ("connections", y), axes, lines)
}

/// Draws lines by quantile. Both axes are logarithmic. A point at `x` is the time that one of `x` messages exceeds.
///
/// # Errors
/// There are no points, or the drawing library failed.
pub fn by_quantile(title: &str, y: &str, lines: &[Line]) -> Result<String, Failure> {
    let points = all_points(lines)?;
    let mut marks: Vec<f64> = points.iter().map(|p| p.0).collect();
    marks.sort_by(f64::total_cmp);
    marks.dedup();
    let (low, high) = (marks[0] / 1.3, marks[marks.len() - 1] * 1.3);
    let x = Axis { low, high, marks, label: quantile_label };
    draw(title, ("share of messages that are faster", y), (x, decades(points.iter().map(|p| p.1), time_label)), lines)
}

fn quantile_label(one_in: f64) -> String {
    // Two decimal places suffice. Rounding removes the inaccuracy of the division.
    format!("{} %", ((1.0 - 1.0 / one_in) * 1e4).round() / 1e2)
}

fn all_points(lines: &[Line]) -> Result<Vec<(f64, f64)>, Failure> {
    let points: Vec<_> = lines.iter().flat_map(|(_, points, _)| points.iter().copied()).collect();
    if points.is_empty() { Err(Failure::new("cannot draw the chart: there is nothing to draw")) } else { Ok(points) }
}

fn draw(title: &str, descriptions: (&str, &str), axes: (Axis, Axis), lines: &[Line]) -> Result<String, Failure> {
    let mut svg = String::new();
    let drawn = draw_to(&mut svg, title, descriptions, axes, lines);
    drawn.map_err(|error| Failure::new(format!("cannot draw the chart: {error}")))?;
    Ok(svg)
}

fn draw_to(
    svg: &mut String,
    title: &str,
    (x_desc, y_desc): (&str, &str),
    (x, y): (Axis, Axis),
    lines: &[Line],
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(svg, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&WHITE)?;
    let grey = RGBColor(70, 70, 70);
    let mut chart = ChartBuilder::on(&root)
        .margin(20)
        .caption(title, ("sans-serif", 20).into_font().color(&grey))
        .x_label_area_size(50)
        .y_label_area_size(70)
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .x_desc(x_desc)
        .y_desc(y_desc)
        .label_style(("sans-serif", 14).into_font().color(&grey))
        .axis_desc_style(("sans-serif", 16).into_font().color(&grey))
        .bold_line_style(RGBColor(220, 220, 220))
        .light_line_style(TRANSPARENT)
        .axis_style(RGBColor(120, 120, 120))
        .draw()?;
    for (name, points, color) in lines {
        let color = *color;
        chart
            .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)).point_size(0))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], color.stroke_width(2)));
        chart.draw_series(points.iter().map(|&point| Circle::new(point, 4, color.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .label_font(("sans-serif", 16).into_font().color(&grey))
        .background_style(WHITE)
        .border_style(RGBColor(200, 200, 200))
        .margin(12)
        .draw()?;
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_point_and_many_have_axes_around_them() {
        for values in [vec![7.3], vec![0.9, 5.0, 4200.0], vec![1.0, 10.0]] {
            let axis = decades(values.iter().copied(), time_label);
            assert!(values.iter().all(|&v| axis.low < v && v < axis.high), "{axis:?}");
            assert_eq!((axis.marks.first(), axis.marks.last()), (Some(&axis.low), Some(&axis.high)));
        }
        let axis = size_axis([1.0, (1 << 20) as f64].into_iter());
        assert!(axis.low < 1.0 && axis.marks.len() <= 16);
        let axis = powers_of_ten([1.0, 10_000.0].into_iter());
        assert_eq!(axis.marks, [1.0, 10.0, 100.0, 1e3, 1e4]);
    }

    #[test]
    fn a_quantile_is_written_as_a_share() {
        assert_eq!([2.0, 100.0, 1000.0].map(quantile_label), ["50 %", "99 %", "99.9 %"]);
    }
}
