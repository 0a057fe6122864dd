//! The measurements of one command, one for each message size. Prints tables and the histogram, and writes files.

use super::address;
use super::chart;
use super::cli::RunArgs;
use super::client;
use super::device::Carrier;
use super::dial::Dial;
use super::failure::{Ending, Failure};
use super::figures::{Figures, size_label, us};
use super::file::ResultFile;
use super::histogram;
use super::interrupt::Interrupt;
use super::json;
use super::output::Output;
use super::plan::Plan;
use super::processor;
use super::table;

use std::net::SocketAddr;

/// Runs `rdma-pingpong client`.
///
/// # Errors
/// The flags are invalid, or the server cannot be reached or goes away.
pub fn connect(server: &str, port: u16, args: &RunArgs) -> Result<Ending, Failure> {
    let carrier = Carrier::new(&args.device)?;
    let plans = Plan::from_args(args, carrier.provider)?;
    let addresses = carrier.leading_to(address::resolve(server, port)?)?;
    let outputs = Outputs::open(args)?;
    let interrupt = Interrupt::on_signals()?;
    Series::new(plans, Plan::selected_size(args), outputs).run(addresses, &interrupt)
}

/// The destinations of the results: tables and files.
#[derive(Debug)]
pub struct Outputs {
    tables: Output,
    json: Option<Json>,
    svg: Option<ResultFile>,
}

#[derive(Debug)]
enum Json {
    Stdout,
    File(ResultFile),
}

impl Outputs {
    /// Opens the files that the flags name. This happens before the measurement, so that a wrong name is reported early.
    ///
    /// # Errors
    /// A file cannot be opened for writing.
    pub fn open(args: &RunArgs) -> Result<Self, Failure> {
        let json = match &args.json {
            None => None,
            Some(path) if path.as_os_str() == "-" => Some(Json::Stdout),
            Some(path) => Some(Json::File(ResultFile::open("--json", path)?)),
        };
        let svg = args.svg.as_ref().map(|path| ResultFile::open("--svg", path)).transpose()?;
        let tables = if matches!(json, Some(Json::Stdout)) { Output::stderr() } else { Output::stdout() };
        Ok(Self { tables, json, svg })
    }
}

/// The measurements of one command, with the destinations of their results.
// local: rows of the table
#[derive(Debug)]
pub struct Series {
    plans: Vec<Plan>,
    selected: u32,
    outputs: Outputs,
}

impl Series {
    /// Makes a series of planned measurements. The histogram is shown for the message size `selected`, or for the last plan if no plan
    /// has that size.
    #[must_use]
    pub const fn new(plans: Vec<Plan>, selected: u32, outputs: Outputs) -> Self {
        Self { plans, selected, outputs }
    }

    /// Runs the measurements, and prints and writes their results.
    ///
    /// # Errors
    /// The server cannot be reached or goes away, or a file could not be written.
    pub fn run(mut self, addresses: Vec<SocketAddr>, interrupt: &Interrupt) -> Result<Ending, Failure> {
        let mut dial = Dial::new(addresses);
        let mut results: Vec<Figures> = Vec::new();
        // The load of the machine is read before the measurements, because the measurements increase it.
        let busy = self.plans.first().and_then(|plan| processor::busy(plan.job.wait));
        for plan in &self.plans {
            let figures = client::run(plan, &mut dial, interrupt, &mut self.outputs.tables)?;
            if figures.measured.iterations > 0 {
                if results.last().is_none_or(|last| last.provider != figures.provider) {
                    if let Some(last) = results.last() {
                        self.outputs
                            .tables
                            .line(format_args!("The table above: {}, below: {}", last.provider, figures.provider));
                    }
                    self.outputs.tables.line(table::head(plan.job.mode));
                }
                self.outputs.tables.line(table::row(&figures));
                results.push(figures);
            }
            if interrupt.is_raised() {
                break;
            }
        }
        self.report(&results, busy)?;
        if !interrupt.is_raised() {
            return Ok(Ending::Complete);
        }
        if results.is_empty() {
            self.outputs.tables.line("interrupted before the first result");
        }
        Ok(Ending::Interrupted)
    }

    fn report(&mut self, results: &[Figures], busy: Option<String>) -> Result<(), Failure> {
        let out = &mut self.outputs.tables;
        let selected = results.iter().find(|figures| figures.plan.job.size == self.selected).or(results.last());
        if let Some(figures) = selected {
            if let Some(latency) = &figures.measured.latency {
                let what = figures.plan.time();
                let (first, rest) = what.split_at(1);
                let size = size_label(figures.plan.job.size.into());
                out.line(format_args!("\n{}{rest}, {size}:", first.to_uppercase()));
                out.text(&histogram::text(latency));
            }
            out.line(format_args!("\n{}", summary(figures)));
            busy.into_iter().for_each(|busy| out.line(busy));
        }
        if let Some(svg) = self.outputs.svg.take().filter(|_| !results.is_empty()) {
            svg.write(&chart::latency(results)?)?;
        }
        let text = format!("{:#}\n", json::results(results));
        match self.outputs.json.take() {
            None => Ok(()),
            Some(Json::Stdout) => {
                Output::stdout().text(&text);
                Ok(())
            }
            // Without results, an existing file keeps its content.
            Some(Json::File(_)) if results.is_empty() => Ok(()),
            Some(Json::File(file)) => file.write(&text),
        }
    }
}

/// Formats the line about one measurement.
fn summary(figures: &Figures) -> String {
    let Figures { plan, measured, processors, provider, interrupted, .. } = figures;
    let stopped = if *interrupted { "interrupted; " } else { "" };
    let crc = if plan.job.crc { "" } else { " without CRC" };
    let connections =
        if plan.job.connections > 1 { format!(", {} connections", plan.job.connections) } else { String::new() };
    let how = format!("{stopped}provider {provider}{crc}{connections}, wait {}", plan.job.wait);
    let size = size_label(plan.job.size.into());
    let seconds = measured.elapsed.as_secs_f64();
    let op = plan.job.op;
    let figures = match &measured.latency {
        Some(h) => format!(
            "{how}: {op} of {size}, {} p50 {:.2} us, p99 {:.2} us; {} of them in {seconds:.2} s",
            plan.time(),
            us(h.value_at_quantile(0.5)),
            us(h.value_at_quantile(0.99)),
            measured.iterations
        ),
        None => format!(
            "{how}: {op} of {size}{}, {:.3} Gbit/s, {:.0} messages/s; {} messages in {seconds:.2} s",
            if plan.job.bidirectional { " both ways" } else { "" },
            figures.gbit_per_second(),
            figures.messages_per_second(),
            measured.messages
        ),
    };
    let server =
        processors.server.map(|time| format!(", {:.2} s at the server", time.as_secs_f64())).unwrap_or_default();
    let client = processors.client.as_secs_f64();
    format!("{figures}\nprocessor time, warm-up included: {client:.2} s here{server}")
}
