//! The tests of large messages that land (are placed directly) in the program's own memory.

use std::cell::RefCell;
use std::rc::Rc;

use rdma_reactor::{Access, ConnectionId, Context, Offered, Outcome, Region, RegionOptions, SendErrorKind};

use super::harness::{Event, Pair, Probe, Setup, pattern};

/// The length of the largest payload that fits in one buffer in these tests, in bytes.
const BUFFER: usize = 4096;
/// The length of the longest message, in bytes.
const LONG: usize = 64 << 20;
/// The tag of messages that the server refuses.
const UNWANTED: u64 = u64::MAX;

/// The server's region, in which messages land. `None` if the region was dropped, or if the test has taken it.
type Place = Rc<RefCell<Option<Region>>>;

/// A connected pair. The server lands each message at the position in the region that the message's tag gives. It refuses a message that
/// does not fit at that position. After this answer, the server calls `then` with the offer.
struct Landings {
    p: Pair,
    here: ConnectionId,
    place: Place,
    source: Region,
}

fn landings(
    setup: &Setup,
    len: usize,
    mut then: impl FnMut(&mut Context<'_>, ConnectionId, Offered, &Place) + 'static,
) -> Landings {
    let place = Place::default();
    let lands = Rc::clone(&place);
    let server = Probe::new(move |cx, event| {
        let Event::Offered(conn, offered) = event else { return };
        if let Some(tag) = offered.tag {
            let landed = match &mut *lands.borrow_mut() {
                Some(region) => cx.land(*conn, offered.id, region, tag as usize),
                None => Err(SendErrorKind::Closed),
            };
            if landed.is_err() {
                cx.refuse_offer(*conn, offered.id).expect("it is not answered yet");
            }
        }
        then(cx, *conn, *offered, &lands);
    });
    let config = setup.config().buffer_size(BUFFER as u32).large_messages(|l| l.eager_limit = 0);
    let mut p = Pair::new(setup, config, server, Probe::default());
    (p.s.large, p.c.large) = (true, true);
    let here = p.connect();
    let there = p.s.connection().expect("the server was told");
    let sink = RegionOptions::new().allow(Access::READ_SINK);
    *place.borrow_mut() = Some(p.server.context().regions().register(there, len, &sink).expect("a region"));
    let readable = RegionOptions::new().allow(Access::REMOTE_READ);
    let source = p.client.context().regions().register_vec(here, pattern(3, len), &readable).expect("a region");
    Landings { p, here, place, source }
}

impl Landings {
    fn offer(&mut self, len: usize, tag: u64) {
        self.p.client.context().offer(self.here, &self.source, 0..len, tag).expect("room");
    }

    fn finish(mut self) {
        drop((self.source, self.place.borrow_mut().take()));
        self.p
            .until("all regions are gone", |p| p.client.stats().memory.regions + p.server.stats().memory.regions == 0);
        self.p.finish();
    }
}

/// Returns true if the message with this tag has landed, and false if it has failed to land. Returns `None` if the server was not notified
/// yet.
fn landed(p: &Pair, tag: u64) -> Option<bool> {
    p.s.events.iter().find_map(|event| match event {
        Event::Landed(_, offered, is_there) if offered.tag == Some(tag) => Some(*is_there),
        _ => None,
    })
}

/// Messages of any length must land at their positions, in order with other messages, and must use no memory of the library. A message
/// whose offer the program does not answer must arrive by `on_recv`. The sender must be notified of refusals.
pub fn messages_land_in_the_program_s_memory(setup: &Setup) {
    let mut l = landings(setup, LONG, |_, _, _, _| {});
    l.p.client.context().send(l.here, b"before").expect("room");
    l.offer(LONG, 0);
    l.p.client.context().send(l.here, b"behind").expect("room");
    l.p.until("the long one", |p| p.c.count(|e| matches!(e, Event::Sent(..))) == 3 && p.s.received == 2);
    assert_eq!(l.p.server.stats().memory.fetched_bytes, 0);
    assert_eq!(landed(&l.p, 0), Some(true));
    let order = l.p.s.events.iter().filter_map(|event| match event {
        Event::Recv(_, bytes) => Some(bytes.len()),
        Event::Landed(_, offered, _) => Some(offered.len as usize),
        _ => None,
    });
    assert_eq!(order.collect::<Vec<_>>(), [6, LONG, 6]);
    let bytes_of = |place: &Place, at: usize, len: usize| {
        let mut bytes = vec![0; len];
        place.borrow().as_ref().expect("it is there").copy_to(at, &mut bytes);
        bytes
    };
    assert!(bytes_of(&l.place, 0, LONG) == pattern(3, LONG));
    // The messages have landed, so the program can write to the region again.
    l.place.borrow_mut().as_mut().expect("it is there").copy_from(0, &vec![0; LONG]).expect("not lent");

    l.offer(100, 12_345);
    l.offer(100, UNWANTED);
    l.p.client.context().send(l.here, &pattern(4, 1 << 20)).expect("room");
    l.p.until("all of them", |p| p.c.count(|e| matches!(e, Event::Sent(..))) == 6 && p.s.received == 3);
    assert!(bytes_of(&l.place, 12_344, 102)[1..101] == pattern(3, LONG)[..100]);
    assert_eq!(bytes_of(&l.place, 12_445, 1), [0], "nothing behind it was touched");
    assert_eq!(l.p.s.messages()[2], pattern(4, 1 << 20));
    assert_eq!((landed(&l.p, 12_345), landed(&l.p, UNWANTED)), (Some(true), None));
    assert_eq!(l.p.c.count(|e| matches!(e, Event::Sent(_, _, Outcome::Refused))), 1);
    l.finish();
}

/// While a long message is being fetched, a refusal of a later offer must free the slot of that offer immediately, so that the sender can
/// offer further messages. The order of messages must not change.
pub fn refusals_make_room_at_once(setup: &Setup) {
    let mut l = landings(setup, LONG, |_, _, _, _| {});
    l.offer(LONG, 0);
    let mut offered = 0;
    while offered < 100 {
        match l.p.client.context().offer(l.here, &l.source, 0..1000, UNWANTED) {
            Ok(_) => offered += 1,
            Err(SendErrorKind::WouldBlock(_)) => l.p.turn(),
            Err(error) => panic!("{error}"),
        }
    }
    l.p.client.context().send(l.here, b"behind").expect("room");
    l.p.until("the message behind it all", |p| p.s.received == 1);
    assert_eq!(landed(&l.p, 0), Some(true));
    l.p.until("all refusals", |p| p.c.count(|e| matches!(e, Event::Sent(_, _, Outcome::Refused))) == 100);
    l.finish();
}

/// Invalid answers to an offer must return errors, and must leave the offer unanswered.
pub fn careless_landings_are_refused(setup: &Setup) {
    let answers = Rc::new(RefCell::new(Vec::new()));
    let seen = Rc::clone(&answers);
    let mut stray = landings(setup, BUFFER, |_, _, _, _| {});
    let foreign = stray.place.borrow_mut().take().expect("a region of another reactor");
    let elsewhere = RefCell::new(Some(foreign));
    let mut l = landings(setup, 2 * BUFFER, move |cx, conn, offered, _| {
        let mut seen = seen.borrow_mut();
        if offered.tag.is_some() {
            // `landings` has already answered this offer, so a second answer must be refused.
            seen.push(cx.refuse_offer(conn, offered.id));
        } else if let Some(mut region) = elsewhere.borrow_mut().take() {
            seen.push(cx.land(conn, offered.id, &mut region, 0));
            seen.push(cx.land(conn, offered.id, &mut region, usize::MAX));
        }
    });
    let client = &mut l.p.client;
    assert_eq!(client.context().offer(l.here, &l.source, 7..7, 0), Err(SendErrorKind::Empty));
    let outside = client.context().offer(l.here, &l.source, 0..2 * BUFFER + 1, 0);
    assert!(matches!(outside, Err(SendErrorKind::OutOfBounds { .. })), "{outside:?}");
    let private = client.context().regions().register(l.here, BUFFER, &RegionOptions::new()).expect("a region");
    assert_eq!(client.context().offer(l.here, &private, 0..8, 0), Err(SendErrorKind::NotReadable { max: 0 }));
    l.offer(BUFFER, BUFFER as u64);
    l.p.client.context().send(l.here, &pattern(4, BUFFER + 1)).expect("room");
    l.p.until("both", |p| p.c.count(|e| matches!(e, Event::Sent(..))) == 2 && p.s.received == 1);
    {
        let answers = answers.borrow();
        assert_eq!(answers[..2], [Err(SendErrorKind::NoOffer), Err(SendErrorKind::ForeignRegion)]);
        assert!(matches!(answers[2], Err(SendErrorKind::OutOfBounds { .. })), "{answers:?}");
    }
    assert_eq!(l.p.s.messages()[0], pattern(4, BUFFER + 1));
    // The offer is answered after `on_offer` has returned, which is too late.
    let (there, late) = (l.p.s.connection().expect("it was told"), last_offer(&l.p));
    let mut region = l.place.borrow_mut().take().expect("a region");
    assert_eq!(l.p.server.context().land(there, late.id, &mut region, 0), Err(SendErrorKind::NoOffer));
    drop((private, region));
    l.finish();
    stray.p.client.context().send(stray.here, b"on").expect("room");
    stray.p.until("the message", |p| p.s.received == 1);
    stray.finish();
}

fn last_offer(p: &Pair) -> Offered {
    let mut offers =
        p.s.events.iter().filter_map(|e| if let Event::Offered(_, offered) = e { Some(*offered) } else { None });
    offers.next_back().expect("one was offered")
}

/// The program drops the region while a message lands in it. The memory must exist until the message has landed.
pub fn a_place_may_be_dropped(setup: &Setup) {
    let mut l = landings(setup, 8 << 20, |_, _, _, place| drop(place.borrow_mut().take()));
    l.offer(8 << 20, 0);
    l.p.until("the end", |p| p.c.sent == 1 && landed(p, 0) == Some(true));
    l.p.until("the region is gone", |p| p.server.stats().memory.regions == 0);
    l.finish();
}

/// If the connection ends while messages are landing, `on_landed` must be called once for each of these messages, before `on_disconnect`.
/// After `on_disconnect`, the program must be able to use the memory again.
pub fn a_place_comes_back_with_the_end_of_its_connection(setup: &Setup) {
    for ending in ["the server closes", "the client aborts"] {
        let mut l = landings(setup, LONG, move |cx, conn, offered, _| {
            if ending == "the server closes" && offered.tag == Some(1) {
                cx.close(conn);
            }
        });
        l.offer(LONG - 1, 0);
        l.offer(LONG - 1, 1);
        l.p.until("both are offered", |p| p.s.count(|e| matches!(e, Event::Offered(..))) == 2);
        if ending == "the client aborts" {
            l.p.client.context().abort(l.here);
        }
        l.p.until("the end", |p| p.s.count(|e| matches!(e, Event::Disconnect(..))) == 1);
        let (first, second) = (landed(&l.p, 0), landed(&l.p, 1));
        // The first message may have landed just before the connection ended. The second message must have failed to land.
        assert!(first.is_some() && second == Some(false), "{ending}: {first:?}, {second:?}");
        assert_eq!(l.p.s.count(|e| matches!(e, Event::Landed(..))), 2, "{ending}");
        assert!(matches!(l.p.s.events.last(), Some(Event::Disconnect(..))), "{ending}");
        l.place.borrow_mut().as_mut().expect("it is there").copy_from(0, &[1]).expect("not lent any more");
        l.finish();
    }
}

/// On a secured connection, messages cannot land, because they must be decrypted first. They must arrive by `on_recv`.
pub fn secured_messages_do_not_land(setup: &Setup) {
    let answers = Rc::new(RefCell::new(Vec::new()));
    let seen = Rc::clone(&answers);
    let place = Place::default();
    let lands = Rc::clone(&place);
    let server = Probe::new(move |cx, event| {
        if let (Event::Offered(conn, offered), Some(region)) = (event, &mut *lands.borrow_mut()) {
            seen.borrow_mut().push(cx.land(*conn, offered.id, region, 0));
        }
    });
    let config = setup.config().buffer_size(BUFFER as u32).large_messages(|l| l.eager_limit = 0);
    let mut p = Pair::new(setup, config, server, Probe::default());
    (p.s.large, p.c.large) = (true, true);
    let here = p.connect();
    let there = p.s.connection().expect("the server was told");
    *place.borrow_mut() =
        Some(p.server.context().regions().register(there, 1 << 20, &RegionOptions::new()).expect("a region"));
    let region = p.client.context().regions().register(here, BUFFER, &RegionOptions::new()).expect("a region");
    let refused = p.client.context().offer(here, &region, 0..8, 1);
    assert!(matches!(refused, Err(SendErrorKind::Unsupported { .. })), "{refused:?}");
    p.client.context().send(here, &pattern(5, 100_000)).expect("room");
    p.until("the message", |p| p.s.received == 1 && p.c.sent == 1);
    assert!(matches!(answers.borrow()[..], [Err(SendErrorKind::Unsupported { .. })]), "{answers:?}");
    assert_eq!(p.s.messages()[0], pattern(5, 100_000));
    drop((region, place.borrow_mut().take()));
    p.finish();
}
